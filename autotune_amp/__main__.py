"""Entry point of ``python -m autotune_amp``."""

from autotune_amp.cli import main

if __name__ == "__main__":
    main()
