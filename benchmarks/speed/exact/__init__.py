"""What the readings of every architecture are held against."""
