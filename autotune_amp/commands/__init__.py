"""Commands of the command line that would make cli.py too long. Nothing heavy is imported before their work is done."""
