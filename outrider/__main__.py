"""`python -m outrider`: the same as `outrider`."""

from outrider.main import main

main()
