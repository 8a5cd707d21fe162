"""Islands agree on who is there by one list of epochs, in a store with compare-and-swap (docs/elastic.md)."""
