"""One model cut over many workers: by its state, its width, its depth, and the batch besides."""
