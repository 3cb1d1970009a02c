"""What a bundle holds, for people and for scripts, and how two bundles differ. No stage of an export is used here."""
