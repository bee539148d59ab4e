"""Items, bags, edges, batches, decoding, keyed draws and sampling."""
