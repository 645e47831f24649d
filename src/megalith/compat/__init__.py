"""Meeting other programs at the border: what they print, what they accept."""
