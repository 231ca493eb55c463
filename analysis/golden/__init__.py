"""How the golden models that the tests compare with are made."""
