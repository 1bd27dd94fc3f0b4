from autotune_amp.search.statistics import *
