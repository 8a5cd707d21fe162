"""What a run tells about itself, and where to."""
