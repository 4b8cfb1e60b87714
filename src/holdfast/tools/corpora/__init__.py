"""`holdfast data build`: makes token files from text, and verifies that a token file is intact."""
