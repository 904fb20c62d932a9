package android.widget;

public class Spinner extends AdapterView<SpinnerAdapter> {
    public SpinnerAdapter getAdapter() { throw new RuntimeException(); }
    public void setAdapter(SpinnerAdapter adapter) { throw new RuntimeException(); }
    public void setSelection(int position) { throw new RuntimeException(); }
}
