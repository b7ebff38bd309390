"""`python -m services.merged`."""

from services.merged.main import main

main()
