"""How many of which device a load needs: measured where it can be, computed where it cannot."""
