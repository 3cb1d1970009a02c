"""The functional graph as shared libraries for processors."""
