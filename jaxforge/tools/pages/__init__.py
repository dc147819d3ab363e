"""HTML pages that tools write: their parts, style and scripts."""
