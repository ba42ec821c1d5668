"""The pages of docs/: links, the keys and messages that they name, examples, the site."""
