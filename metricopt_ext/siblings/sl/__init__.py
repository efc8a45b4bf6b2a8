"""Learning Surrogate Losses (Grabocka et al., 2019): a network of a batch's scores and labels."""
