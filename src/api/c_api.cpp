#include "delta_attention/version.h"
