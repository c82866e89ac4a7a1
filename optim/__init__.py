"""What happens between a gradient and a new weight."""
