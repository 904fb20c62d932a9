/* Where some callers look for it. */
#include "../qhexrt_c.h"
