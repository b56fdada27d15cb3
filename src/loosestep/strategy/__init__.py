"""What is shared, between whom, when and how: pure values."""
