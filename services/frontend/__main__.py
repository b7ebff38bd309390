"""`python -m services.frontend`."""

from services.frontend.main import main

if __name__ == "__main__":
    main()
