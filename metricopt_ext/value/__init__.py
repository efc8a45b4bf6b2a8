"""Value functions f: phi -> metric (paper, section 3.1): what they are, and how they are fitted and measured."""
