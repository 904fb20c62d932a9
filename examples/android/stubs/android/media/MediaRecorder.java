package android.media;

public class MediaRecorder {
    public final class AudioSource {
        public static final int VOICE_RECOGNITION = 6;
    }
}
