"""What each client of the tier `clients` does: programs that run where it is installed, and print what they were told.

They take the server's address, and import nothing of ours.
"""
