"""Full replicas: ranks that each have all of the optimizer, and are kept equal (PAFT; docs/corruption.md)."""
