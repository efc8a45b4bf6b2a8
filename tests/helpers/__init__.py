"""What tests of several modules share. A fixture belongs in a ``conftest.py``; a function that is imported, here."""
