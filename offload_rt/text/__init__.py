"""Text and tokens: tokenization, chat templates, documents, grammars."""
