"""The model cut by its depth: stages on different workers, through which parts of the batch follow each other."""
