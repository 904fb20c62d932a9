package android.media;

public final class AudioFormat {
    public static final int CHANNEL_IN_MONO = 16;
    public static final int ENCODING_PCM_16BIT = 2;
}
