"""``python -m hsx_dist.cli``: the command ``hsx`` where no script is installed."""

from hsx_dist.cli import main

if __name__ == "__main__":
    main()
