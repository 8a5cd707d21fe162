"""Islands that are launches of their own: they find each other at a rendezvous, and come and go (docs/elastic.md)."""
