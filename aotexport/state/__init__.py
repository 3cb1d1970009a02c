"""The world that a call may change, before and after it: found, compared, told and put back."""
