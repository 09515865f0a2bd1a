"""`python -m cp_engine`: the same command as launch.py, from any folder."""

from cp_engine.job.cli import main

if __name__ == "__main__":
    main()
