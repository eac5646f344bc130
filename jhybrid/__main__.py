"""`python -m jhybrid`."""

from jhybrid.cli import main

main()
