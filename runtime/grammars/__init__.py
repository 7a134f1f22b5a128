"""Grammars: a request's output is text of a language that it names, with speculation as without."""
