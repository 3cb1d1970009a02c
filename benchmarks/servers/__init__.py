"""What is measured behind a server: models with requests, the peers' servers, and clients that load them."""
