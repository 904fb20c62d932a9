/* Asks a model: chat BUNDLE QUESTION */
#include <stdio.h>

#include "qhexrt_c.h"

static int say(void *user, const char *utf8, int len, int token_id, int is_final) {
    (void)user;
    (void)token_id;
    fwrite(is_final ? "\n" : utf8, 1, is_final ? 1 : (size_t)len, stdout);
    return 1;
}

static int fail(void) {
    qhx_error error = {0};
    error.struct_size = sizeof error;
    qhx_last_error(&error);
    fprintf(stderr, "error: %s\n", error.message);
    if (error.hint) fprintf(stderr, "  hint: %s\n", error.hint);
    return error.status;
}

int main(int argc, char **argv) {
    if (argc != 3) return QHX_ERROR_USAGE;
    qhx_runtime *runtime = qhx_runtime_create(NULL, NULL);
    qhx_model *model = runtime ? qhx_model_load(runtime, argv[1], NULL) : NULL;
    qhx_session *session = model ? qhx_session_create(model) : NULL;
    if (!session) return fail();

    qhx_inputs inputs = {0};
    inputs.text = argv[2];
    qhx_gen_cfg cfg;
    qhx_gen_cfg_default(&cfg);
    cfg.max_new_tokens = 64;
    qhx_output output;
    if (qhx_generate(session, &inputs, &cfg, say, NULL, &output) != QHX_OK) return fail();
    fprintf(stderr, "%d tokens in %.0f ms\n", output.n_generated, output.prefill_ms + output.decode_ms);

    qhx_session_free(session);
    qhx_model_free(model);
    qhx_runtime_free(runtime);
    return 0;
}
