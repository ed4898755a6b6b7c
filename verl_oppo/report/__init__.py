"""`python -m verl_oppo.report RUN_DIR ...`: a page and pictures from the metrics of any OPPO or verl run."""
