"""What several folders of tests share: tiny models, engines over them, references, and cases."""
