"""What 2.1.0 has in place of features."""
