"""`python -m services.kvstore`."""

from services.kvstore.main import main

main()
