"""Where jobs run: processes of their own, forked, kept or fresh."""
