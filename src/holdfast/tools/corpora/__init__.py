"""`holdfast data build`: text into token files, and whether a token file is whole."""
