"""One line that makes a training loop share what a strategy says."""
