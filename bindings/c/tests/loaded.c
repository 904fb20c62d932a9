/* A library that calls qhexrt as it is loaded, as a log's callback or a library of a device may. */
#include "qhexrt_c.h"

#include <stdio.h>
#include <unistd.h>

__attribute__((constructor)) static void loaded(void) {
    char arch[32];
    qhx_error error = {sizeof(qhx_error), QHX_OK, NULL, NULL, NULL, 0};
    /* What waits for itself would never end. */
    alarm(60);
    qhx_runtime_device(NULL, arch, sizeof arch, NULL, NULL);
    if (qhx_runtime_create(NULL, NULL)) return;
    qhx_last_error(&error);
    fprintf(stderr, "while it is loaded: %s\n", error.message);
    alarm(0);
}
