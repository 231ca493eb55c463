"""From runs to acceptance figures: statistics, pictures, and what the demo measures. Nothing else imports from here."""
