"""One verb a file, which reads the words, calls and prints; no verb imports another.

A ``ConfigError`` of a verb is a wrong command line or config, told in three lines, with exit status 2.
"""
