"""Parts, style and scripts of the HTML pages that tools write."""
