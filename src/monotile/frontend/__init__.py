"""Python source to IR: the words of the language, statements, expressions, subscripts, source locations."""
