package android.view;

public class View {
    public static final int VISIBLE = 0;
    public static final int GONE = 8;
    public static final int FOCUS_DOWN = 130;
    public interface OnClickListener {
        void onClick(View v);
    }
    public void setOnClickListener(OnClickListener l) { throw new RuntimeException(); }
    public boolean isEnabled() { throw new RuntimeException(); }
    public void setEnabled(boolean enabled) { throw new RuntimeException(); }
    public int getVisibility() { throw new RuntimeException(); }
    public void setVisibility(int visibility) { throw new RuntimeException(); }
    public boolean post(Runnable action) { throw new RuntimeException(); }
}
