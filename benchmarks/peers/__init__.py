"""The same GPT as a user of each library would write it."""
