"""Islands: complete training jobs that exchange some of their parameters, late (AsyncMesh, section 4; docs/islands.md)."""
