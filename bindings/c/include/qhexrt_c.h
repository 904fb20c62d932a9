/* The C ABI of qhx: bundles of the Hexagon NPU from C and whatever calls C.
 *
 * Functions and fields that are marked `qhx:` are additions of this implementation. All else is the interface that
 * published bundles are called through; the order of fields is this header's own.
 *
 * - Nothing here ends the process, installs a signal handler, starts a process or prints to standard output. Qualcomm's
 *   libraries may print.
 * - Handles are numbers in the shape of pointers: they are not to be dereferenced, are never given out twice, and one
 *   that is freed, NULL or somebody else's is an error.
 * - Texts are UTF-8. What a function is given is copied or done with when it returns.
 * - Functions may be called from any thread. A session runs one generation at a time: another call returns
 *   QHX_ERROR_BUSY, from a callback of the session as well. Sessions run beside each other.
 * - Callbacks of a generation are called on the thread that called qhx_generate. They must not throw.
 * - The library stays loaded until the process ends.
 * - A library of a later minor version runs programs that were built with this header. Structs that begin with
 *   `struct_size` may get further fields at their end, whose default is 0; all others stay as they are, and further
 *   results come from functions. So a `…_default` writes the fields of 1.0 only: who sets later ones clears the struct
 *   before the call, and sets `struct_size` to its sizeof after it.
 */
#ifndef QHEXRT_C_H
#define QHEXRT_C_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32) && defined(QHX_DLL)
#define QHX_API __declspec(dllimport)
#else
#define QHX_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define QHX_ABI_VERSION_MAJOR 1
#define QHX_ABI_VERSION_MINOR 1

/* History entries that a generation takes at most. */
#define QHX_MAX_HISTORY 4096

typedef struct qhx_runtime qhx_runtime;
typedef struct qhx_model qhx_model;
typedef struct qhx_session qhx_session;

typedef int32_t qhx_status;
enum {
    QHX_OK = 0,
    QHX_ERROR_USAGE = 2,       /* an argument makes no sense */
    QHX_ERROR_MANIFEST = 3,    /* the manifest is missing or invalid */
    QHX_ERROR_ARTIFACT = 4,    /* a file of the bundle is missing, cut short, or not what it claims to be */
    QHX_ERROR_RUNTIME = 5,     /* a QNN library is missing, or is none */
    QHX_ERROR_CONTEXT = 6,     /* a context binary does not load on this device */
    QHX_ERROR_GRAPH = 7,       /* a graph or tensor is missing, or has another shape */
    QHX_ERROR_PLUGIN = 8,      /* a plugin is missing, incompatible, or misbehaved */
    QHX_ERROR_PROMPT = 9,      /* the prompt is empty, too long, or of an unknown modality */
    QHX_ERROR_EXECUTE = 10,    /* executing a graph failed */
    QHX_ERROR_IO = 11,         /* reading failed outside the bundle */
    QHX_ERROR_DEVICE_LOST = 12,/* the device restarted; the next generation opens it again */
    QHX_ERROR_PANICKED = 13,   /* a host-op panicked; the session opens it again by the next generation */
    QHX_ERROR_HANDLE = 14,     /* a handle is NULL, freed, or none of ours */
    QHX_ERROR_BUSY = 15,       /* the session generates already, or there is a runtime or one is being made */
    QHX_ERROR_INTERNAL = 70,   /* a fault of qhx itself */
    QHX_ERROR_CANCELLED = 130  /* the generation was cancelled; the output holds what came before */
};

enum {
    QHX_GRAMMAR_NONE = 0,
    QHX_GRAMMAR_JSON = 1,          /* `json`, or `json:` and a JSON schema */
    QHX_GRAMMAR_TOOL_CALL = 2,     /* calls of tools and nothing else; a JSON list of tools, as chat templates take it */
    QHX_GRAMMAR_TOOL_CALL_MAYBE = 3,/* a text, calls of tools, or both; a list as for 2 */
    QHX_GRAMMAR_CHOICE = 4         /* one of several texts: a JSON list, or texts with commas between */
};

/* Text that became complete with a token: `len` bytes of whole UTF-8 characters, with a NUL behind them. At most one
 * call a token; text that was held back, as it could have become a stop string, comes with `token_id` -1. The last call
 * has `is_final` 1, `len` 0 and `token_id` -1, also after a cancellation. 0 stops the generation, which then returns
 * QHX_OK, without a further call. */
typedef int (*qhx_token_cb)(void *user, const char *utf8, int len, int token_id, int is_final);

/* Nonzero cancels. Asked before any work, as a prompt goes on, and between tokens. */
typedef int (*qhx_should_cancel_cb)(void *user);

/* How tokens are chosen. It stays as it is: further options are those of qhx_generate_options. */
typedef struct qhx_gen_cfg {
    int max_new_tokens;              /* 1024 by default */
    float temperature;               /* 0, the default, takes the most likely token */
    int top_k;                       /* 0 is off */
    float top_p;                     /* 1 is off */
    float min_p;                     /* 0 is off */
    float repetition_penalty;        /* 1 is off */
    int repetition_window;           /* last tokens that the penalty sees; 0 for all */
    uint64_t seed;                   /* 0 draws one */
    const char *const *stop_strings; /* none of them is part of the answer */
    int n_stop_strings;
    const int32_t *stop_token_ids;
    int n_stop_token_ids;
    const char *grammar;
    int grammar_kind;                /* QHX_GRAMMAR_… */
} qhx_gen_cfg;

/* What is asked. A bundle without a chat template completes `text`; one that embeds returns the vector of `text`; one
 * that transcribes takes audio without a text. It stays as it is, as qhx_gen_cfg does. */
typedef struct qhx_inputs {
    const char *text;                /* may be NULL beside an image or audio, or to go on with `history` */
    const char *system_prompt;       /* NULL for none */
    const char *const *history;      /* user, assistant, user, assistant, … */
    int n_history;                   /* at most QHX_MAX_HISTORY, and even */
    int no_template;                 /* completes `text` as it is */
    const char *image_path;          /* PNG, JPEG, WebP or GIF; or … */
    const void *image_data;          /* … the bytes of such a file */
    size_t image_size;
    const char *mask_path;           /* no family takes one: refused */
    const float *audio;              /* one channel of samples from -1 to 1 */
    int64_t n_audio;
    int audio_sr;                    /* samples a second */
} qhx_inputs;

/* qhx: kinds of qhx_media. */
enum { QHX_MEDIA_IMAGE = 1, QHX_MEDIA_AUDIO = 2 };

/* qhx: an image or audio clip, of which `path`, `data` or `samples` is set. It stays as it is: it lies in arrays. */
typedef struct qhx_media {
    int kind;
    const char *path;
    const void *data;                /* bytes of a file */
    size_t size;
    const float *samples;            /* audio, one channel */
    int64_t n_samples;
    int sample_rate;
} qhx_media;

/* Fields that `struct_size` does not cover are as if they were not there. */
typedef struct qhx_generate_options {
    size_t struct_size;
    int disable_thinking;            /* where the chat template knows that */
    qhx_should_cancel_cb should_cancel;
    void *should_cancel_user;
    const int32_t *tokens;           /* qhx: the prompt, instead of `text`, without a template */
    int n_tokens;
    const qhx_media *media;          /* qhx: after those of qhx_inputs; at `<image>` and `<audio>`, or before the text */
    int n_media;
    int every_token;                 /* qhx: also calls for tokens whose text is empty or not complete yet */
    int embed_query;                 /* qhx: embeds `text` as a query, not as a document */
    int logprobs;                    /* qhx: gives the log-probability of each token */
    int top_logprobs;                /* qhx: and of this number of most likely tokens in its place, at most 128 */
    int reserved;                    /* qhx: 0 */
    /* Since 1.1. */
    const int32_t *logit_bias_tokens;/* qhx: tokens to whose logits is added … */
    const float *logit_biases;       /* … this, from -100, which excludes a token, to 100 */
    int n_logit_bias;
    int word_times;                  /* qhx: a transcription finds when each word is said: qhx_session_last_word */
    const char *cache_salt;          /* qhx: goes on from states of the same salt only; NULL for none */
    const char *vad;                 /* qhx: transcribes speech alone, found by rules as JSON ("{}"); NULL for all */
} qhx_generate_options;

/* What came of it. Pointers are the session's until its next generation, its reset or its end. It stays as it is: what
 * a later version returns besides comes from functions named qhx_session_last_…, with pointers that stay as long. */
typedef struct qhx_output {
    qhx_status status;
    const char *text;                /* never NULL after QHX_OK and QHX_ERROR_CANCELLED */
    int n_generated;                 /* tokens */
    int n_prompt;                    /* positions: tokens, and those of images and audio */
    double prefill_ms;
    double decode_ms;
    const float *audio;              /* no family makes any yet: NULL */
    int64_t n_audio;
    int sample_rate;
    const float *embedding;
    int n_embedding;
    const uint8_t *image;            /* no family makes any yet: NULL */
    int img_h;
    int img_w;
    int img_c;
    size_t n_text;                   /* qhx: bytes of `text`, which may hold a NUL */
    int n_reused;                    /* qhx: of the prompt, positions whose state was there already */
    const char *finish_reason;       /* qhx: eos, stop, length or cancelled; NULL where there is no text */
    const int32_t *tokens;           /* qhx: `n_generated` tokens; NULL where a transcription or vector was made */
    const float *logprobs;           /* qhx: natural logarithms, one a token, where they were asked for, or NULL */
    const int32_t *top_tokens;       /* qhx: `n_top` a token, the most likely first; -1 where there are fewer */
    const float *top_logprobs;       /* qhx: theirs; minus infinity where there are fewer */
    int n_top;
} qhx_output;

/* The QNN libraries, or NULL for those of QHX_QNN_HTP and QHX_QNN_SYSTEM, the installed ones, or those that the
 * dynamic loader finds. QHX_BACKEND is auto, cpu or qnn. There is one runtime at a time; NULL on failure. */
QHX_API qhx_runtime *qhx_runtime_create(const char *htp, const char *system);
/* Models and sessions that are still there go on. */
QHX_API void qhx_runtime_free(qhx_runtime *runtime);
/* Architecture of the device (such as v81), number of its chip, and of the architecture (such as 81). Empty and 0
 * where there is no device, unless QHX_DEVICE_ARCH says one. Any pointer may be NULL; `size` 32 is enough. */
QHX_API void qhx_runtime_device(qhx_runtime *runtime, char *arch, int size, int *soc, int *htp);

/* Opens a bundle: a manifest, or its folder. `artifacts` is the folder that its paths resolve against, or NULL for the
 * manifest's own. NULL on failure. */
QHX_API qhx_model *qhx_model_load(qhx_runtime *runtime, const char *manifest, const char *artifacts);
/* Sessions that are still there go on. */
QHX_API void qhx_model_free(qhx_model *model);

/* A session with a state of its own over the model's contexts and weights. NULL on failure. */
QHX_API qhx_session *qhx_session_create(qhx_model *model);
/* A generation of another thread is cancelled and waited for. From a callback of the session it is refused. */
QHX_API void qhx_session_free(qhx_session *session);
/* Forgets all that was consumed. */
QHX_API void qhx_session_reset(qhx_session *session);
/* Ends the generation under way within one graph execution, if there is one. Later ones are not concerned. */
QHX_API void qhx_session_cancel(qhx_session *session);

QHX_API void qhx_gen_cfg_default(qhx_gen_cfg *cfg);
QHX_API void qhx_generate_options_default(qhx_generate_options *options);

/* `cfg` may be NULL for the defaults, `callback` for none, `output` where the text is not wanted as a whole. */
QHX_API qhx_status qhx_generate(qhx_session *session, const qhx_inputs *inputs, const qhx_gen_cfg *cfg,
                                qhx_token_cb callback, void *user, qhx_output *output);
QHX_API qhx_status qhx_generate_ex(qhx_session *session, const qhx_inputs *inputs, const qhx_gen_cfg *cfg,
                                   const qhx_generate_options *options, qhx_token_cb callback, void *user,
                                   qhx_output *output);

/* A sentence on a status, for people. */
QHX_API const char *qhx_status_str(qhx_status status);
/* The version of the library. */
QHX_API const char *qhx_version(void);

/* qhx: why the last call of this thread that failed did so. Texts are there until the thread's next failure. */
typedef struct qhx_error {
    size_t struct_size;              /* set by the caller to sizeof(qhx_error) */
    qhx_status status;               /* QHX_OK where nothing has failed yet */
    const char *kind;                /* one word, such as manifest */
    const char *message;
    const char *hint;                /* a likely fix, or NULL */
    uint64_t code;                   /* of a QNN library, or 0 */
} qhx_error;
QHX_API qhx_status qhx_last_error(qhx_error *error);

/* qhx: positions that the session has consumed; -1 on failure. */
QHX_API int64_t qhx_session_position(qhx_session *session);

/* qhx: why the last answer ended, as `finish_reason` says, and the stop string that ended it: NULL where none did, as
 * by a token or the callback. Both are NULL where there is no answer. Since 1.1, as the next two functions. */
QHX_API qhx_status qhx_session_last_stop(qhx_session *session, const char **reason, const char **text);
/* qhx: words of the last transcription with `word_times`; -1 on failure. */
QHX_API int qhx_session_last_n_words(qhx_session *session);
/* qhx: one of them, from 0 on, with the seconds at which it begins and ends. Any pointer may be NULL. */
QHX_API qhx_status qhx_session_last_word(qhx_session *session, int index, const char **text, double *start,
                                         double *end);

/* qhx: what the session has consumed, as bytes that a session of the same bundle goes on from, in another process as
 * well. They hold the conversation: keep them as private. `bytes` is the session's until its next call. */
QHX_API qhx_status qhx_session_export(qhx_session *session, const void **bytes, size_t *size);
/* qhx: goes on from such bytes. QHX_ERROR_USAGE where they are cut short, damaged, of another bundle or of a newer
 * version; the session is then as it was. */
QHX_API qhx_status qhx_session_import(qhx_session *session, const void *bytes, size_t size);

/* qhx: how qhx_runtime_create_ex differs from qhx_runtime_create. */
typedef struct qhx_runtime_options {
    size_t struct_size;
    const char *htp;                 /* as for qhx_runtime_create */
    const char *system;
    const char *backend;             /* auto, cpu or qnn, instead of QHX_BACKEND; NULL for that */
    const char *device_arch;         /* such as v81, instead of QHX_DEVICE_ARCH; NULL for that */
    const char *plugins;             /* a folder of plugins, searched first; NULL for the usual places only */
    int threads;                     /* 0 for one a core */
    const char *decode_on;           /* auto, cpu or npu: what consumes the tokens of answers; NULL for what consumes
                                      * prompts */
    const char *cpu_activations;     /* auto, int16 or int8: what the CPU rounds activations to; NULL for auto */
    const char *cpu_caches;          /* f16 or f32: what the CPU stores caches as; NULL for f16 */
} qhx_runtime_options;
QHX_API void qhx_runtime_options_default(qhx_runtime_options *options);
QHX_API qhx_runtime *qhx_runtime_create_ex(const qhx_runtime_options *options);

/* qhx: called with what is logged, from any thread. Levels: 1 error, 2 warning, 3 info, 4 debug, 5 trace. It may call
 * the library, but for qhx_log_set, which is QHX_ERROR_BUSY there; what that logs does not come back. */
typedef void (*qhx_log_cb)(void *user, int level, const char *target, const char *message);
/* Messages up to `level`. NULL ends it: once this has returned, no call is under way. */
QHX_API qhx_status qhx_log_set(qhx_log_cb callback, void *user, int level);

#ifdef __cplusplus
}
#endif

#endif
